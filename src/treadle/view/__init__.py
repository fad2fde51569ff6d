"""`treadle view`: a run directory in the browser. It reads what runs have recorded and writes nothing.

    run directory --recorded_run--> run_pages, groups, trajectories, ... --app--> JSON --static/--> pages

A page asks for its answer by path; a file made by `export` carries the answers.
"""
