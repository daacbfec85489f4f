"""What a change would do, for a pull request: the stacks' diffs, the loop's decisions, what they cost, one comment."""
