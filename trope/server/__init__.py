"""`trope serve`: a trained model behind HTTP, with the events that arrive while it runs.

app.py           the routes, as a FastAPI application
page_files.py    the page in the browser, which is in page/: plain JavaScript modules, no build step
timeline.py      a year of answers in one small body, for the page
gate.py          what every request passes first: key, rate, size, one log line, one answer for each kind of failure
schema.py        bodies and parameters to events and questions; refuses what is wrong in one line
queue.py         one worker thread; what arrives together is written and answered together
worker.py        what that thread does with a batch: store events, follow the store, answer questions, swap models
answers.py       questions to answers; scoring.py: to scores and their parts; encoder.py: to vectors
served.py        one model with everything that is live beside it: popularity.py, people.py, dataset.py
store.py         where events are kept: sqlite_store.py (embedded), redis_store.py (several servers); open_store.py
trial.py         arms of an experiment: who answers whom, and what is logged; start_trial.py: its options
models.py        loading a new model beside the old one, and watching a folder for it
"""
