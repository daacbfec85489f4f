"""Whether the loop lives and is ready, and what it measures, over HTTP."""
