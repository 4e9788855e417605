"""Data: an event log becomes a prepared folder, and a prepared folder becomes sequences to train on.

`trope.data.prepare` turns a log of (user, item, time) into a prepared folder with a data engine (the `data` extra);
`trope.data.sequences` reads that folder with torch and numpy only. This file imports nothing, so a
training machine never loads the engine.
"""
