"""Parts of which the types of requests and responses are made: numbers, texts, and marks for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

U64_MAX = 2**64 - 1
U32_MAX = 2**32 - 1

# msgspec's own bounds are int64; `beyond_u64` checks the rest.
U64 = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": U64_MAX})]
U32 = Annotated[int, Meta(ge=0, le=U32_MAX)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]

# In documents only: the type accepts more, and the server checks the rest, or is the one that sends it.


def doc(description: str, **schema: Any) -> Meta:
    """The description of a field, and members of its schema that msgspec does not check."""
    return Meta(description=description, extra_json_schema=schema or None)


def schema(**members: Any) -> Meta:
    return Meta(extra_json_schema=members)


def one_of(*values: str) -> Meta:
    """The values of a string in a response. Clients accept others: newer servers may have more."""
    return schema(enum=[*values])


class Answer(Struct, kw_only=True, omit_defaults=True):
    """A JSON object in a response, encoded by the server and decoded by the client.

    A field with a default is absent when it has that value: `= None` means absent, `X | None` without a default means that
    `null` is sent. The document follows from this; the two marks below are the exceptions.
    """


# Not in this body: the client fills it in, or other bodies of the same kind have it.
HIDDEN = Meta(extra={"document": "hidden"})
# Always in this body, which the server does not encode as this type: the default is for clients that make one.
ALWAYS = Meta(extra={"document": "always"})

Count = Annotated[int, schema(minimum=0, maximum=U64_MAX)]
Seq = Annotated[int, schema(minimum=1, maximum=U64_MAX)]
TimeMs = Annotated[int, doc("Milliseconds since the Unix epoch.", minimum=0)]
Milliseconds = Annotated[float, schema(minimum=0)]
HeadSeq = Annotated[Count, doc("Highest seq of the topic; 0 before the first record.")]
EarliestSeq = Annotated[Seq, doc("First seq that still exists; `head_seq` + 1 if there is none.")]
NextCursor = Annotated[str, doc("`cursor` of the next page; absent on the last page.")] | None
EpochText = Annotated[
    str,
    doc(
        "Identifies the topic among those that have had this name and, for `memory` and `ephemeral`, how often its head went "
        "back. Opaque; send it with a cursor."
    ),
]
