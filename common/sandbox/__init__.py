"""Sandboxed processes for code that may hang, crash, attack or use up the memory: rewards, environments.

In the role: pool.py and settings.py are what others use, starter.py starts a process, handle.py is one
process, output.py logs what processes print.
In trusted processes: nursery.py forks, keeper.py kills, isolation.py separates.
Around foreign code: body.py runs it, user.py and limits.py take its rights, late_imports.py,
sources.py and packages.py read beforehand what it imports. frames.py is how they all talk.
"""
