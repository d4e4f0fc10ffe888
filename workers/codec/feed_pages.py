"""Pages of records as watchers get them."""

from __future__ import annotations

from topics.engine.commands import topics as cmd
from topics.engine.reading.render import render_records
from topics.link.watch import FeedOptions, FeedPage


def feed_page(page: cmd.Page, from_seq: int) -> FeedPage:
    to_seq = page.next_from_seq
    return FeedPage(
        from_seq,
        to_seq,
        page.head_seq,
        page.earliest_seq,
        len(page.seqs),
        to_seq >= page.head_seq,
        page.tombstone,
    )


def render(page: cmd.Page, options: FeedOptions) -> bytes:
    return render_records(
        page,
        include_tags=options.include_tags,
        include_meta=options.include_meta,
        include_data=options.include_data,
    )
