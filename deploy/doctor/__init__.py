"""`penstock doctor`: what would keep a run from going well, before it starts.

Each check is a function that yields findings and changes nothing. `run` is the command.
"""
