"""`treadle view`: a run directory in the browser. It reads what runs have recorded and writes nothing.

    RunDirectory, LedgerReader, shards --recorded_run, groups, trajectory--> models --app--> JSON --static/--> pages

models.py says what each page is given. A page asks for it by path, and a file made by `export` carries the answers.
"""
