"""The process that Spark forks its Python workers from, with their modules already imported: `spark.python.daemon.module`.

Spark's own imports them after each fork, half a second each time. Not pyarrow, whose import starts a thread; nor may NumPy's.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy  # noqa: F401
import pyspark.daemon
import pyspark.sql.datasource
import pyspark.sql.types
import pyspark.worker

if __name__ == "__main__":
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would copy one thread of several"
    pyspark.daemon.manager()
