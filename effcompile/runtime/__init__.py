"""What a planned model is when it runs: executables, what they hold of every call, and the folders they are
saved in.
"""
