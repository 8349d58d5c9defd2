"""What a batch costs, as the broker and the model processes both count it. The one home of what they must agree on.

A batch costs its dearest item times the number of items where a model pads them to one length, otherwise as much as its
items together; and every forward costs something whatever is in it.
"""

# What one forward costs on top of its items, as a share of `max_batch_cost`: at most these few per cent. That limit is
# measured, and with it a model is within them of its best speed, or nearer, where it has room for more items.
FORWARD_PRICE_SHARE = 0.05
