"""Reading: the code of `spark.read.format("waltz")` on the driver and on executors."""
