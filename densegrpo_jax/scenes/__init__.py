"""A tiny world of coloured shapes and short words: drawings, captions, a rule-based judge, and a small SD3 trained on it."""
