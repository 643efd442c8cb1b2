"""Several replicas behind one server: the front routes requests, replicas compute them. Like `engine`, it imports no HTTP code.

    client --HTTP--> front: admission, templates, tokens, router --TCP--> replica: scheduler, KV, kernels, text

A replica is a process with a complete engine. It dials the front, and redials when the connection is lost. The front has a
`Fleet` where a single server has its engine.
"""
