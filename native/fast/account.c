/* The credits of a connection: the numbers, and what happens to them for frames with messages.
 *
 * The rules, and why they are as they are, stand in aiordma/_core/credits.py, whose class works on
 * these members; a test drives both and compares.
 */
#include "account.h"

PyTypeObject *fast_account_type;

static void give_back(struct account *account, unsigned int *control, unsigned int *data)
{
	*control = account->owed_control;
	*data = account->owed_data;
	account->owed_control = account->owed_data = 0;
}

void fast_spend_data(struct account *account, unsigned int *control, unsigned int *data)
{
	account->data--;
	give_back(account, control, data);
}

void fast_spend_control(struct account *account, unsigned int *control, unsigned int *data)
{
	account->control--;
	give_back(account, control, data);
}

static bool come_back(struct account *account, unsigned int control, unsigned int data)
{
	if (control > account->control_limit - account->control ||
	    data > account->data_limit - account->data)
		return false;
	account->control += control;
	account->data += data;
	return true;
}

bool fast_received_data(struct account *account, unsigned int control, unsigned int data)
{
	if (account->held_data + account->owed_data >= account->data_receives ||
	    !come_back(account, control, data))
		return false;
	account->held_data++;
	return true;
}

bool fast_received_control(struct account *account, unsigned int control, unsigned int data)
{
	if (account->held_control + account->owed_control >= account->control_receives ||
	    !come_back(account, control, data))
		return false;
	account->owed_control++;
	return true;
}

void fast_reposted_data(struct account *account, unsigned int count)
{
	account->held_data -= count;
	account->owed_data += count;
}

bool fast_credit_frame_due(const struct account *account)
{
	if (account->owed_control >= 2)
		return account->control >= 1;
	if (account->owed_data >= account->data_threshold)
		return account->control >= (account->owed_control ? 1 : 2);
	return false;
}

static PyObject *account_spend(PyObject *self, PyObject *unused)
{
	struct account *account = (struct account *)self;
	unsigned int control, data;

	(void)unused;
	if (!account->data)
		Py_RETURN_NONE;
	fast_spend_data(account, &control, &data);
	return Py_BuildValue("II", control, data);
}

static PyObject *account_receive(PyObject *self, PyObject *args)
{
	unsigned int control, data;

	if (!PyArg_ParseTuple(args, "II", &control, &data))
		return NULL;
	return PyBool_FromLong(fast_received_data((struct account *)self, control, data));
}

static PyObject *account_receive_credit(PyObject *self, PyObject *args)
{
	unsigned int control, data;

	if (!PyArg_ParseTuple(args, "II", &control, &data))
		return NULL;
	return PyBool_FromLong((control || data) &&
			       fast_received_control((struct account *)self, control, data));
}

static PyObject *account_spend_credit(PyObject *self, PyObject *unused)
{
	struct account *account = (struct account *)self;
	unsigned int control, data;

	(void)unused;
	if (!fast_credit_frame_due(account))
		Py_RETURN_NONE;
	fast_spend_control(account, &control, &data);
	return Py_BuildValue("II", control, data);
}

static PyObject *account_repost(PyObject *self, PyObject *args)
{
	struct account *account = (struct account *)self;
	unsigned int count;

	if (!PyArg_ParseTuple(args, "I", &count))
		return NULL;
	if (count > account->held_data)
		Py_RETURN_FALSE;
	fast_reposted_data(account, count);
	Py_RETURN_TRUE;
}

static PyObject *account_due(PyObject *self, void *unused)
{
	(void)unused;
	return PyBool_FromLong(fast_credit_frame_due((struct account *)self));
}

#define NUMBER(name) {"_" #name, T_UINT, offsetof(struct account, name), 0, NULL}

static PyMemberDef account_members[] = {
	NUMBER(data),           NUMBER(control),       NUMBER(data_limit),
	NUMBER(control_limit),  NUMBER(data_receives), NUMBER(control_receives),
	NUMBER(data_threshold), NUMBER(held_data),     NUMBER(held_control),
	NUMBER(owed_data),      NUMBER(owed_control),  {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef account_getset[] = {
	{"plainly_due", account_due, NULL, NULL, NULL},
	{NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef account_methods[] = {
	{"plainly_spend", account_spend, METH_NOARGS, NULL},
	{"plainly_receive", account_receive, METH_VARARGS, NULL},
	{"plainly_spend_credit", account_spend_credit, METH_NOARGS, NULL},
	{"plainly_receive_credit", account_receive_credit, METH_VARARGS, NULL},
	{"plainly_repost", account_repost, METH_VARARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot account_slots[] = {
	{Py_tp_doc, "The credits of a connection."},
	{Py_tp_members, account_members},
	{Py_tp_getset, account_getset},
	{Py_tp_methods, account_methods},
	{0, NULL},
};

static PyType_Spec account_spec = {
	.name = "aiordma._native._fast.Account",
	.basicsize = sizeof(struct account),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.slots = account_slots,
};

int fast_add_account(PyObject *module)
{
	fast_account_type = fast_add_type(module, &account_spec);
	return fast_account_type ? 0 : -1;
}
