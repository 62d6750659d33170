"""What a search over a generation needs beside that of a forward call: its two regimes, their sizes and their
texts.
"""
