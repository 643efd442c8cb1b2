"""Predictors: how many tokens will a request generate? One file each, imported when it is chosen. Called by the scheduler."""

PREDICTORS = {
    "none": "penstock.sched.policies.predictors.none:NoPredictions",
    "online": "penstock.sched.policies.predictors.online:OnlinePredictor",
}
