"""Data sets: from files, the Hugging Face hub and generators to tasks.

    load.load_tasks -> sources.open_source -> rows.make_task       JSON lines, generators: a list of tasks
                                           -> table.ArrowTasks     Parquet, Hugging Face: rows are read when asked for
                    -> mixture.Mixture                             several of these, by weight

`rows` defines what a row must be, `tasks` the interface of sequences of tasks that are not in memory.
"""
