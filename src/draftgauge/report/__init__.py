"""Renders runs, comparisons, checkpoints and recordings for people. Computes nothing, never imports torch."""
