/* The credits of a connection, as far as what is plain needs them; see account.c. */
#ifndef AIORDMA_FAST_ACCOUNT_H
#define AIORDMA_FAST_ACCOUNT_H

#include "fast.h"

/* Named as in aiordma/_core/credits.py. */
struct account {
	PyObject_HEAD
	unsigned int data, control;
	unsigned int data_limit, control_limit;
	unsigned int data_receives, control_receives;
	unsigned int data_threshold;
	unsigned int held_data, held_control;
	unsigned int owed_data, owed_control;
};

extern PyTypeObject *fast_account_type;

/* For a frame with messages, of which there must be one credit: what goes back in its header. */
void fast_spend_data(struct account *account, unsigned int *control, unsigned int *data);

/* A frame with messages has arrived, with these credits: false, and nothing happens, when that is
 * for Python to find fault with. */
bool fast_received_data(struct account *account, unsigned int control, unsigned int data);

bool fast_credit_frame_due(const struct account *account);

/* For a CREDIT frame, which must be due, or a CONTROL frame, for which there must be a credit beyond the
 * reserve. */
void fast_spend_control(struct account *account, unsigned int *control, unsigned int *data);

/* Such a frame has arrived, and its receive is posted again: false, and nothing happens, when that is
 * for Python to find fault with. */
bool fast_received_control(struct account *account, unsigned int control, unsigned int data);

/* So many data receives are posted again: no more than were used. */
void fast_reposted_data(struct account *account, unsigned int count);

int fast_add_account(PyObject *module);

#endif
