"""The step without a loop (`core`), one turn of it (`stepper`), the thread that does turns (`thread`), and their ports."""
