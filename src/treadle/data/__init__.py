"""Data sets: from files, the Hugging Face hub and generators to tasks.

    load.load_tasks -> load.open_source -> rows.make_task       JSON lines, generators: a list of tasks
                                        -> table.ArrowTasks     Parquet, Hugging Face: rows are read on demand
                    -> tasks.Mixture                            several of these, by weight

`rows` defines valid rows, `tasks` sequences of tasks outside memory, `published` reads published data sets.
"""
