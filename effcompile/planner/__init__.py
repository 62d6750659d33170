"""z3: plain numbers in, choices and a certificate out. Knows no torch."""
