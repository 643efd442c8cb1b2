"""The engine: the requests' state (`core`), the steps (`stepper`), the thread that runs them (`thread`), and interfaces for
other packages (`ports`)."""
