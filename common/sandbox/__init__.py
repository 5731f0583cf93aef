"""Sandboxed processes for code that may hang, crash or use up the memory: rewards, environments.

pool.py starts and kills the processes, process.py runs inside of them, user.py takes their rights away.
"""
