"""Of the Python processes that Spark starts, by their PYTHONPATH: they take PySpark from its folder, where it is compiled, and not
from its zip file, which Spark puts in front and which each of them would compile again, for more than a second.
"""

from __future__ import annotations

import sys

sys.path[:] = [path for path in sys.path if not path.endswith("/python/lib/pyspark.zip")]
