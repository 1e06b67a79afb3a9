"""Checks what a program with stale weights did, from a trace of its events.

It imports only the standard library, so that it runs beside any training program.

    events.py   the trace: one JSON line an event
    story.py    what the events say so far: versions, samples in flight
    ages.py     how old weights are
    rules/      what must hold, a file a rule
    check.py    reads a trace once, with all rules
"""
