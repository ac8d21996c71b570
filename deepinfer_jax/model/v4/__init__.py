"""The DeepSeek-V4 text backbone, in float32 arithmetic only (model.md 10).

It runs over the plan and tile loop of V4.1 and shares its primitives. No rounding points are
written here, because no vectors of V4's own exist.
"""
