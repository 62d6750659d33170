"""Ways to run a program."""
