"""Tool calls: many tools, many ways to ask, and the right calls.

schema.py    tools and calls as the chat template writes them
held_out.py  which names and phrasings are kept for evaluation
named.py     requests that name the tool and its parameters ("Call NAME with PARAM = VALUE.")
role.py      what a parameter means, what a tool does, how people ask for it; values.py: what they say
coding_files.py, coding_work.py, everyday.py, composed.py   tools described in natural words: of a coding agent, of an
             assistant, made up
phrasing.py  a natural request with its call
kit.py       the tools of one prompt, requests for them;  episode.py: dialogs to train on, cases to measure with
"""
