"""`treadle view`: a run directory in the browser. It reads recorded runs and writes nothing.

    run directory --recorded_run--> run_pages, groups, trajectories, ... --app--> JSON --static/--> pages

A page requests its answer by path; a file made by `export` contains the answers.
"""
