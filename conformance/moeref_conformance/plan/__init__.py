"""What is going to be judged: matrix, machine, known failures, selection."""
