"""The engine: its state (`core`), one turn with an executor (`stepper`), the thread that does turns (`thread`), and their
ports."""
