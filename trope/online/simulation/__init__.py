"""The rehearsal: the calendar shop in closed loop, with arms, exposures, outcomes and a known true effect.

population.py   the shop's users at the end of its log: histories, tastes, staples
traffic.py      who comes when during the experiment, by the generator's own rates and hours
loop.py         slates are shown, visitors choose by the generator's own probabilities, histories grow
answers.py      who makes the slates: models in this process; over_http.py: a real server
truth.py        everybody in one arm against everybody in the other: the true effect
record.py       exposures and outcomes as files, as a server and a shop would leave them
"""
