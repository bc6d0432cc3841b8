"""`waltz-core disk`: print and verify the files of a storage that is not running."""
