select owner, count(*) as accounts, sum(balance) as balance
from {{ ref('accounts') }}
group by owner
