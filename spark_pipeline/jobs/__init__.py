"""Jobs: split the work into tasks, run them with an engine, and publish the results."""
