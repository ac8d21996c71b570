"""Attention of DeepSeek-V4.1: projections, compression, index selection, core, output."""
