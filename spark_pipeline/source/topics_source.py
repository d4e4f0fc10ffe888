"""The data source `topics`: name, schema, readers and writers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from spark_pipeline.source.batch import PushingReader, TopicsReader, is_pushing_down
from spark_pipeline.source.options import BadOption, SourceOptions, parse, parse_sink
from spark_pipeline.source.stream import TopicsStreamReader
from spark_pipeline.source.writer import TopicsStreamWriter, TopicsWriter
from spark_pipeline.tasks.columns import COLUMNS, schema_of


class TopicsSource(DataSource):
    """`spark.read.format("topics")`, `frame.writeStream.format("topics")` and so on."""

    @classmethod
    def name(cls) -> str:
        return "topics"

    def _parsed(self) -> SourceOptions:
        return parse(dict(self.options))

    def schema(self) -> Any:
        return spark_schema(self._parsed())

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._parsed()
        columns = _columns(options, schema)
        if options.pushdown == "auto" and is_pushing_down():
            return PushingReader(options, columns)
        return TopicsReader(options, columns)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = self._parsed()
        return TopicsStreamReader(options, _columns(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return TopicsWriter(parse_sink(dict(self.options)), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return TopicsStreamWriter(parse_sink(dict(self.options)), schema, overwrite)


def spark_schema(options: SourceOptions) -> Any:
    return from_arrow_schema(schema_of(options.wanted.columns, as_text=options.wanted.as_text))


def _columns(options: SourceOptions, schema: StructType) -> list[str]:
    """A user's schema selects columns, but must not change their types."""
    everything = replace(options, wanted=replace(options.wanted, columns=COLUMNS))
    ours = {field.name: field for field in spark_schema(everything)}
    for field in schema:
        if field.name not in ours:
            raise BadOption(f"no column {field.name!r} in topics; valid ones are {', '.join(COLUMNS)}")
        if field.dataType != ours[field.name].dataType:
            wanted = ours[field.name].dataType.simpleString()
            hint = ", or binary without dataAs=json" if field.name == "data" else ""
            raise BadOption(f"column {field.name} is {wanted}{hint}, not {field.dataType.simpleString()}")
    return [field.name for field in schema]
