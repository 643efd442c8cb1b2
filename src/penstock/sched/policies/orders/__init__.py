"""Orders: who is next among the waiting? One file each, imported when it is chosen. Called by the waiting queue.

Requests of equal keys are served as they came. Every order ages, so that nobody starves: each says by how much a request
that came later may overtake. docs/scheduling.md explains them.
"""

ORDERS = {
    "fcfs": "penstock.sched.policies.orders.fcfs:FirstComeFirstServed",
    "sjf": "penstock.sched.policies.orders.sjf:ShortestJobFirst",
    "srpf": "penstock.sched.policies.orders.srpf:ShortestPrefillFirst",
    "edf": "penstock.sched.policies.orders.edf:EarliestDeadlineFirst",
    "priority": "penstock.sched.policies.orders.priority:PriorityClasses",
    "fair": "penstock.sched.policies.orders.fair:FairShares",
}
