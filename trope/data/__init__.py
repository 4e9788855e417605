"""Event logs in, training-ready sequences out.

`trope.data.prepare` turns a log of (user, item, time) into a prepared folder with a data engine (the `data` extra);
`trope.data.sequences` reads that folder with torch and numpy only. Nothing is imported here, so that a training
machine never loads the engine.
"""
