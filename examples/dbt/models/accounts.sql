select id, owner, balance, _partition, _transaction_id
from {{ source('log', 'accounts') }}
