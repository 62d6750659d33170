"""Models as people have them: a Python file, a HuggingFace or sentence-transformers folder or id,
.safetensors, .pt2.
"""
