"""Orders: who is next among the waiting? Each has a file in `ordering`, imported when chosen. Called by the waiting queue.

Requests of equal keys are served as they came. Every order ages, so that nobody starves: each says by how much a request
that came later may overtake. docs/orders.md explains them.
"""

ORDERS = {
    "fcfs": "penstock.sched.policies.ordering.fcfs:FirstComeFirstServed",
    "sjf": "penstock.sched.policies.ordering.sjf:ShortestJobFirst",
    "srpf": "penstock.sched.policies.ordering.srpf:ShortestPrefillFirst",
    "edf": "penstock.sched.policies.ordering.edf:EarliestDeadlineFirst",
    "priority": "penstock.sched.policies.ordering.priority:PriorityClasses",
    "fair": "penstock.sched.policies.ordering.fair:FairShares",
}
