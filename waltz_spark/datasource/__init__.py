"""Reading: what `spark.read.format("waltz")` runs on the driver and on executors."""
