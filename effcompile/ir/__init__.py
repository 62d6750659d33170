"""What is planned and what was decided: programs, steps, plans. `plan` and `sparsity` load without torch."""
