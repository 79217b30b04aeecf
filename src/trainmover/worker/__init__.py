"""One training process: its lifecycle, the user's API, rehearsal in loop-back, adoption of a rank."""
