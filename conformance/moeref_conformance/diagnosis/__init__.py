"""What happened to a tensor that is not as expected: known mistakes, tried one after the other."""
