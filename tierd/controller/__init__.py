"""Pure decisions: exposure, read times, miss curves, the split, the size, the placement.

No clock and no I/O in here: callers count steps and pass what they measured. Times are ms, as in
the paper (SlackTier), pages are 4 KiB. Nothing of ours is imported but plain data types; numpy is,
because a decision weighs some hundred splits and must take less than a millisecond.
"""
