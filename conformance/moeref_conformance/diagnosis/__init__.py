"""What happened to a tensor that is not what it should be: hypotheses, tried one after the other."""
