"""Data sets: from files, the Hugging Face hub and generators to tasks.

    load.load_tasks -> load.open_source -> rows.make_task       JSON lines, generators: a list of tasks
                                        -> table.ArrowTasks     Parquet, Hugging Face: rows are read when asked for
                    -> tasks.Mixture                            several of these, by weight

`rows` defines what a row must be, `tasks` sequences of tasks that are not in memory, `published` reads data sets of
others.
"""
