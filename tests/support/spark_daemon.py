"""The daemon that forks Spark's Python workers, with their modules already imported: `spark.python.daemon.module`.

Spark's own daemon imports them after each fork, which takes half a second each time. pyarrow is not imported, because
it starts a thread; NumPy must not start threads either.
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
