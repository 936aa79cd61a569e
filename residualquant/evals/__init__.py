"""Procedural tasks, the benchmarks' prompts and problems, scorers, and the loop that evaluates cache configurations."""
