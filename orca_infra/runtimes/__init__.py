"""Warm runtime pools: Pods that wait Ready, so that a launch that fits takes one at once."""
