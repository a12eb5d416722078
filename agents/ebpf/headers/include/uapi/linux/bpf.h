/* Asked for by bcc, whose own copy says the rest. */
#include <linux/types.h>
